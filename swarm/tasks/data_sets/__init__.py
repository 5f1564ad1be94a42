"""Task sources of data sets: files of a user, or a data set of a hub."""
