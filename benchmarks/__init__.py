"""Models and measurements that compare Korch with its peers; not part of the installed package."""
