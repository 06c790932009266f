"""Tables: files and frames of named columns, agreed on by their owners and turned into examples."""
