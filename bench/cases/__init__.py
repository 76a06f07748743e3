"""The cases: what each does, what it is compared with, and the bytes it moves."""
