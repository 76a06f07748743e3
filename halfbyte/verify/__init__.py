"""`halfbyte verify`: every kernel on this machine against the reference, byte for byte, and a few speeds."""

from halfbyte.verify.command import main, verify
from halfbyte.verify.plan import Scope

__all__ = ["Scope", "main", "verify"]
