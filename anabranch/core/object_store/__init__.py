"""Object stores by obstore: S3, Google Cloud Storage, Azure, a folder, or memory."""
