"""`anabranch init`: files to begin with, and the readers that describe what a user has."""
