"""Logits of which every rank has some columns: what their cross entropy is made of, and its gradient."""
