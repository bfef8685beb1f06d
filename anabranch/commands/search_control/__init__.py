"""`anabranch search`: shows challengers, and lets a person control them."""
