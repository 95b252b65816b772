"""Models bigger than the machine: built without values, placed on devices, loaded, and run layer by layer."""

from fnaccel.big.device_map import DeviceMap as DeviceMap
from fnaccel.big.device_map import device_map as device_map
from fnaccel.big.dispatch import Dispatch as Dispatch
from fnaccel.big.dispatch import dispatch as dispatch
from fnaccel.big.dispatch import dispatch_of as dispatch_of
from fnaccel.big.dispatch import fetched as fetched
from fnaccel.big.empty import empty as empty
from fnaccel.big.empty import on as on
from fnaccel.big.loading import load as load
from fnaccel.big.mover import Mover as Mover
from fnaccel.big.offloading import offload as offload
from fnaccel.big.quantize.choosing import chosen_layers as chosen_layers
from fnaccel.big.quantize.choosing import quantized_layers as quantized_layers
from fnaccel.big.quantize.config import quantization_of as quantization_of
from fnaccel.big.quantize.records import Fp4 as Fp4
from fnaccel.big.quantize.records import Int4Weights as Int4Weights
from fnaccel.big.quantize.records import Int8 as Int8
from fnaccel.big.quantize.records import Int8Weights as Int8Weights
from fnaccel.big.quantize.records import Nf4 as Nf4
from fnaccel.big.quantize.replacing import dequantize as dequantize
from fnaccel.big.quantize.replacing import quantize as quantize
from fnaccel.big.quantize.saving import save_quantized as save_quantized
from fnaccel.big.sizes import Sizes as Sizes
from fnaccel.big.sizes import sizes as sizes
from fnaccel.big.staged import pipeline as pipeline
