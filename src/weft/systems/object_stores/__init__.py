"""Objects that change only under a condition, in S3, Azure Blob Storage and Google Cloud Storage."""
