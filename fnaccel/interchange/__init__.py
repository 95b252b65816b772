"""Checkpoints of other tools: read into a state, written for Hugging Face, converted on the command line.

A foreign checkpoint of any format becomes a `Source` (tensors by name, each read block by block). Tensors to
write become `Item`s. So each format is one small file, and none knows of strategies or ranks.
"""

from fnaccel.interchange.adapter import export_adapter as export_adapter
from fnaccel.interchange.adopting import adopt as adopt
from fnaccel.interchange.exporting import export_hf as export_hf
from fnaccel.interchange.state_dict import gather_state_dict as gather_state_dict
