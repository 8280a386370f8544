"""`odb verify`: runs the checks of `model_check` and shows what they covered and found."""
