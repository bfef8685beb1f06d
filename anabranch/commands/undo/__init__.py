"""`anabranch undo`: takes events out of what was learned."""
