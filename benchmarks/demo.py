"""The whole loop on the support desk; the same as `make demo`, and its figures."""

import sys

from examples.support_desk.demo import METHOD, main

if __name__ == "__main__":
    print(METHOD)
    sys.argv += ["--model", ".cache/smollm2-135m-instruct"]
    sys.exit(main())
