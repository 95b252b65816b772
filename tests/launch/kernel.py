"""A real kernel of Jupyter, for tests that run cells."""

from __future__ import annotations

import gc
import textwrap
from types import SimpleNamespace

from jupyter_client.manager import start_new_kernel


class Notebook:
    """A kernel of Jupyter in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.kernel, self.client = start_new_kernel(cwd=str(folder))

    def run(self, source):
        """Run a cell. Returns what it printed, its error output, its value as text and as HTML, and its error."""
        shown = {"stdout": "", "stderr": "", "value": "", "html": "", "error": ""}

        def note(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                shown[content["name"]] += content["text"]
            elif message["msg_type"] == "execute_result":
                shown["value"] = content["data"]["text/plain"]
                shown["html"] = content["data"].get("text/html", "")
            elif message["msg_type"] == "error":
                shown["error"] = f"{content['ename']}: {content['evalue']}"

        self.client.execute_interactive(textwrap.dedent(source), timeout=60, output_hook=note)
        return SimpleNamespace(**shown)

    def close(self):
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)
        del self.kernel, self.client
        gc.collect()
