"""What everything else stands on: the store of cached files, and the reading of small documents."""
