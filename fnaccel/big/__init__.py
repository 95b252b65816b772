"""Models bigger than the machine: built without values, placed on devices, loaded, and run layer by layer."""

from fnaccel.big.device_map import DeviceMap as DeviceMap
from fnaccel.big.device_map import device_map as device_map
from fnaccel.big.dispatch import Dispatch as Dispatch
from fnaccel.big.dispatch import dispatch as dispatch
from fnaccel.big.dispatch import dispatch_of as dispatch_of
from fnaccel.big.empty import empty as empty
from fnaccel.big.empty import on as on
from fnaccel.big.loading import load as load
from fnaccel.big.mover import Mover as Mover
from fnaccel.big.offloading import offload as offload
from fnaccel.big.sizes import Sizes as Sizes
from fnaccel.big.sizes import sizes as sizes
