"""Other libraries; each file needs its own, and is imported only when asked for."""
