#!/usr/bin/env bash
# Run the fast tests on aarch64, the processor of Ascend hosts, by QEMU's user mode in a Debian or Ubuntu root.
# The root (4 GB) is made once, in .venv/aarch64 or $AARCH64_ROOT, from the mirror of this machine or $AARCH64_MIRROR.
# Arguments go to pytest; without them, each folder of tests/ is run by itself, with one line of results.
# Where this machine cannot do that, the script says why and ends without an error.
set -euo pipefail
cd "$(dirname "$0")/.."
root=${AARCH64_ROOT:-$PWD/.venv/aarch64}
uv=.venv/bin/uv

skip() {
    echo "skipped: $*"
    exit 0
}

# Mounts of the script end with it.
if [ "${1:-}" != --mounts-are-private ]; then
    [ "$(uname -sm)" = "Linux x86_64" ] || skip "QEMU's arguments are for Linux on x86_64, this is $(uname -sm)"
    [ "$(id -u)" = 0 ] || skip "a root of another processor needs the rights of root"
    for tool in debootstrap qemu-aarch64-static; do
        command -v "$tool" >/dev/null || skip "$tool is not installed (packages debootstrap and qemu-user-static)"
    done
    unshare --mount true 2>/dev/null || skip "this machine permits no mounts"
    exec unshare --mount --propagation private "$0" --mounts-are-private "$@"
fi
shift

formats=/proc/sys/fs/binfmt_misc
[ -e $formats/register ] || mount -t binfmt_misc binfmt_misc $formats 2>/dev/null || skip "the kernel lacks binfmt_misc"
# The header of an ELF program for this processor, and the bits of it that count; F opens QEMU outside the root.
header='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
bits='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
[ -e $formats/qemu-aarch64 ] ||
    printf %s ":qemu-aarch64:M::$header:$bits:$(command -v qemu-aarch64-static):F" 2>/dev/null >$formats/register ||
    skip "programs for aarch64 cannot be registered"

if [ ! -e "$root/.made" ]; then
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    mirror=${AARCH64_MIRROR:-$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        awk -v suite="$suite" '$1 == suite {print $2; exit}')}
    debootstrap --arch=arm64 --variant=minbase --include=python3,g++,libgomp1 "$suite" "$root" ${mirror:+"$mirror"}
    touch "$root/.made"
fi
version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# torch 2.8 is the last release whose wheel for aarch64 is without CUDA. PyMetis has no wheel, and Triton is for GPUs.
rm -rf "$root/opt/packages" "$root/opt/source" "$root/opt/wheel"
mkdir -p "$root/opt/source"
$uv build --quiet --wheel --out-dir "$root/opt/wheel" .
grep -vE '^(torch|triton)==' constraints.txt >"$root/opt/constraints.txt"
printf '%s\n' mypy pymetis ruff triton >"$root/opt/excludes.txt"
# shellcheck disable=SC2086 # several options
$uv pip install --quiet ${UV_OPTIONS:-} --index-strategy unsafe-best-match \
    --python-platform aarch64-manylinux_2_28 --python-version "$version" --target "$root/opt/packages" \
    --constraint "$root/opt/constraints.txt" --excludes "$root/opt/excludes.txt" \
    'torch==2.8.*' "lightning-gnn[dev] @ file://$(echo "$root"/opt/wheel/*.whl)"
# The tests import the package of the wheel, which holds what the repository keeps elsewhere; pages link to its files.
git ls-files -z -- . ':!lightning_gnn' | tar --create --null --files-from - | tar --extract --directory "$root/opt/source"
cp -r "$root/opt/packages/lightning_gnn" "$root/opt/source/lightning_gnn"

mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"

# QEMU reports no processor time of a process, by which the tests recognize a hang: TEST_SILENCE keeps them waiting.
test_in_root() {
    chroot "$root" env -i HOME=/root PATH=/usr/bin:/bin LANG=C.UTF-8 PYTHONPATH=/opt/packages TEST_SILENCE=1000000 \
        sh -c 'cd /opt/source && exec python3 -m pytest -p no:xdist --timeout 0 -m "not slow and not medium" --hypothesis-profile small "$@"' \
        sh "$@"
}

if [ $# -gt 0 ]; then
    test_in_root "$@"
    exit
fi
failed=
for tests in $(cd "$root/opt/source" && echo tests/*/) 'tests/test_*.py'; do
    log="$root/opt/$(basename "$tests" .py).log"
    # shellcheck disable=SC2086 # several files
    test_in_root $tests >"$log" 2>&1 || [ $? = 5 ] || failed=1 # 5: no test is fast
    echo "$tests $(grep -E '^[0-9]+ (passed|failed|skipped|deselected|error)' "$log" | tail -1)"
done
echo "logs: $root/opt/*.log"
[ -z "$failed" ]
