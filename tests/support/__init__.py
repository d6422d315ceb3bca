"""What the tests build their world from; every piece takes away what it made, also on failure."""
