"""Other packages that train or load models, each in a module that imports it."""
