"""A rank of `elastic_launch`: ``python -m drumline.launch.rank DIRECTORY LOCAL_RANK``."""

from drumline.launch.function import call

if __name__ == "__main__":
    call()
