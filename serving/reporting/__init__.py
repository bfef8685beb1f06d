"""What serving reports about itself, also over several workers."""
