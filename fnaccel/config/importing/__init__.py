"""Configurations of other tools as recipes: Accelerate and DeepSpeed. Tables say what their keys become."""

from fnaccel.config.importing.draft import Imported as Imported
from fnaccel.config.importing.draft import Row as Row
from fnaccel.config.importing.files import commented as commented
from fnaccel.config.importing.files import import_document as import_document
from fnaccel.config.importing.files import import_file as import_file
from fnaccel.config.importing.files import kind_of as kind_of
from fnaccel.config.importing.files import parse as parse
