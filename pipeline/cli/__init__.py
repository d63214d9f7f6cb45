"""The command line, one file a command group; heavy imports stay inside the command that needs them."""
