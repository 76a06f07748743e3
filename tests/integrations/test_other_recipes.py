"""The sentence with which integrations refuse a checkpoint of a run in other recipes."""

from halfbyte.integrations.other_recipes import recipe_difference


def test_equal_recipes_are_no_difference():
    assert recipe_difference({"a": "x", "b": "y"}, {"b": "y", "a": "x"}) is None


def test_the_first_layer_of_the_model_is_named():
    now = {"layers.2": "x", "layers.10": "x"}  # sorted by name, 10 would come first
    assert recipe_difference(now, {"layers.10": "y", "layers.2": "y"}) == (
        "the checkpoint's run trained layers.2 in y, this model has x there (2 layers differ)"
    )


def test_layers_that_one_of_them_lacks():
    assert "trained a in high precision, this model has x there (1 " in recipe_difference({"a": "x"}, {})
    assert "trained a in X, this model has NONE there" in recipe_difference(
        {}, {"a": "x"}, lambda k: (k or "none").upper()
    )
