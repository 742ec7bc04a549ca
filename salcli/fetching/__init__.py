"""Getting data sets from the web: what lies where, downloads that resume, archives that cannot do harm."""
