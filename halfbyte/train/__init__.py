"""The main job: train a small language model under any recipe, and compare recipes on equal terms.

Import the module you need: `config` (what a run is), `loop` (run it), `compare` (several recipes), `model` (the decoder).
"""
