raise ImportError("not yet")
