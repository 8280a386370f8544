"""`odb demo`: real training on this machine, three ways of batching side by side."""

from odb.demo.options import DemoOptions
from odb.demo.run import DemoReport, run_demo

__all__ = ["DemoOptions", "DemoReport", "run_demo"]
