"""`Machine` and `Question`: the facts that defaults come from, and one question of `fnaccel config`."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from fnaccel.errors import ConfigError, nearest

Kind = Literal["choice", "number", "text", "yes or no"]


@attrs.frozen(kw_only=True)
class Machine:
    """The facts of this machine that defaults come from.

    Attributes:
        accelerators: how many.
        bf16: whether they compute in bf16.
        fp8: whether they compute in fp8.
        tpu: whether they are TPUs.
        installed: optional packages that are installed, such as `"deepspeed"`.
    """

    accelerators: int = 0
    bf16: bool = False
    fp8: bool = False
    tpu: bool = False
    installed: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Question:
    """One question.

    Attributes:
        name: its key in a file of answers.
        text: the question.
        kind: of the answer.
        default: the answer that Enter gives.
        why: the reason for the default, or the use of the answer. One line.
        choices: answers and their explanations, for the kind `"choice"`.
        least: the smallest number, for the kind `"number"`.
        required: whether an empty text is refused.
    """

    name: str
    text: str
    kind: Kind
    default: Any
    why: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    least: float = 1
    required: bool = False

    def parse(self, answer: object) -> Any:
        """The value of an answer: from a terminal as text, or from a file of answers.

        Raises:
            ConfigError: it is no answer to this question.

        Example:
            >>> question = Question(name="ranks", text="How many?", kind="number", default=1)
            >>> question.parse("4")
            4
        """
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            answer = self.default
        if self.kind == "choice":
            return self._choice(str(answer).strip())
        if self.kind == "yes or no":
            return self._yes(answer)
        if self.kind == "number":
            return self._number(answer)
        if self.required and not answer:
            raise self._error("an empty answer", "it is needed here")
        return None if answer in (None, "") else str(answer).strip()

    def _choice(self, answer: str) -> str:
        names = [name for name, _ in self.choices]
        if answer.isdecimal() and 1 <= int(answer) <= len(names):
            return names[int(answer) - 1]
        if answer not in names:
            raise self._error(repr(answer), nearest(answer, names))
        return answer

    def _yes(self, answer: object) -> bool:
        if isinstance(answer, bool):
            return answer
        words = {"y": True, "yes": True, "true": True, "n": False, "no": False, "false": False}
        if str(answer).strip().lower() not in words:
            raise self._error(repr(answer), "yes or no")
        return words[str(answer).strip().lower()]

    def _number(self, answer: object) -> Any:
        if answer is None or str(answer).strip().lower() in ("none", "no"):
            return None
        try:
            number = float(str(answer))
        except ValueError:
            raise self._error(repr(answer), "a number") from None
        if number < self.least:
            raise self._error(f"{number:g}", f"{self.least:g} or more")
        return int(number) if number.is_integer() and not isinstance(self.default, float) else number

    def _error(self, what: str, fix: str) -> ConfigError:
        return ConfigError(f"{what} is no answer to: {self.text}", where=f"answers.{self.name}", fix=fix)
