"""`anabranch versions`: the published versions of the model."""
