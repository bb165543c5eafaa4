"""Speed and memory, measured beside a peer."""
