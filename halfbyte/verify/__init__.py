"""`halfbyte verify`: every kernel on this machine against the reference, byte for byte, and a few speeds."""

from halfbyte.verify.command import main, verify

__all__ = ["main", "verify"]
