"""The main job: train a small language model under any recipe, and compare recipes on equal terms.

`config` says what a run is, `loop` runs it, `compare` runs several recipes, `model` is the decoder.
"""
