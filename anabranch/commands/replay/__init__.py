"""`anabranch replay`: what is stored for replay."""
