"""Embedding tables and optimizer states in host memory, with every byte verified on its way."""

from fastemb.offload._dense import HostStates
from fastemb.offload._file import (
    DirtyFileError,
    FileFormatError,
    FileGoneError,
    FileInUseError,
)
from fastemb.offload._slots import CacheTooSmallError
from fastemb.offload.engine import OffloadEngine, OffloadStats
from fastemb.offload.errors import IntegrityError
from fastemb.offload.modules import Embedding, EmbeddingBag

__all__ = [
    "CacheTooSmallError",
    "DirtyFileError",
    "Embedding",
    "EmbeddingBag",
    "FileFormatError",
    "FileGoneError",
    "FileInUseError",
    "HostStates",
    "IntegrityError",
    "OffloadEngine",
    "OffloadStats",
]
