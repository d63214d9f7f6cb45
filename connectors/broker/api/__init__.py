"""Request handlers of the local broker, one file per area of the protocol; `table` says which versions are served."""
