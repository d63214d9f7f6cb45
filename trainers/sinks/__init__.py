"""Where the figures of training go beside the topics: one module per tool, all behind one small contract."""
