"""gemq makes a Gemma small and fast without making it worse."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gemq")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
