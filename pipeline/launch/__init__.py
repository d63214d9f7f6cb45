"""Starting, watching and ending the processes of a run on one machine; nothing here touches the data."""
