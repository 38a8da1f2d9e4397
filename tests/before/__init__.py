"""Files that the version before has written, and the run that wrote them."""
