"""Building blocks of the models: each owns its weights, says which checkpoint keys fill them, and calls bound ops."""
