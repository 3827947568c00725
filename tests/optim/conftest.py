"""The in-place functions' worlds."""

from tests.comm.conftest import worlds

__all__ = ["worlds"]
