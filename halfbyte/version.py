"""The version, in one place; the build reads it without importing the package."""

__version__ = "0.2.0"
