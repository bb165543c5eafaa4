"""The laboratory around convnn: what trains, measures and shows it."""
