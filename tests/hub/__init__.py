"""A Hub on the loopback interface, for the kernel repositories of one test."""

from .server import Fault, Hub

__all__ = ["Fault", "Hub"]
