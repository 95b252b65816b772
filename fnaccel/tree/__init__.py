"""Functions of pytrees: nested dicts, lists, tuples, named tuples and registered classes.

Structure
    map map_with_path map_tensors flatten unflatten leaves structure paths items select partition combine
    cast to allclose whole laid_out register

Arithmetic
    norm dot scale axpy lerp
"""

from fnaccel.tree.arithmetic import axpy as axpy
from fnaccel.tree.arithmetic import dot as dot
from fnaccel.tree.arithmetic import laid_out as laid_out
from fnaccel.tree.arithmetic import lerp as lerp
from fnaccel.tree.arithmetic import norm as norm
from fnaccel.tree.arithmetic import scale as scale
from fnaccel.tree.trees import NAMESPACE as NAMESPACE
from fnaccel.tree.trees import IsLeaf as IsLeaf
from fnaccel.tree.trees import Tree as Tree
from fnaccel.tree.trees import allclose as allclose
from fnaccel.tree.trees import cast as cast
from fnaccel.tree.trees import combine as combine
from fnaccel.tree.trees import flatten as flatten
from fnaccel.tree.trees import is_container as is_container
from fnaccel.tree.trees import items as items
from fnaccel.tree.trees import join as join
from fnaccel.tree.trees import learn as learn
from fnaccel.tree.trees import learn_record as learn_record
from fnaccel.tree.trees import learn_records as learn_records
from fnaccel.tree.trees import leaves as leaves
from fnaccel.tree.trees import map as map  # noqa: A004 - the name in every pytree library
from fnaccel.tree.trees import map_tensors as map_tensors
from fnaccel.tree.trees import map_with_path as map_with_path
from fnaccel.tree.trees import open_node as open_node
from fnaccel.tree.trees import partition as partition
from fnaccel.tree.trees import paths as paths
from fnaccel.tree.trees import register as register
from fnaccel.tree.trees import register_mapping as register_mapping
from fnaccel.tree.trees import register_sequence as register_sequence
from fnaccel.tree.trees import select as select
from fnaccel.tree.trees import structure as structure
from fnaccel.tree.trees import to as to
from fnaccel.tree.trees import unflatten as unflatten
from fnaccel.tree.trees import whole as whole
