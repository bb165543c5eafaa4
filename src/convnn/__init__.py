"""Convolution and attention as one operator over nearest neighbours."""

from convnn import backends, functional
from convnn.functional import explain
from convnn.neighbors import Neighbors

__version__ = "0.1.0.dev0"

__all__ = ["Neighbors", "__version__", "backends", "explain", "functional"]
