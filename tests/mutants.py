#!/usr/bin/env python3
"""Plants mistakes in a copy of the engine, one at a time, and has the simulator, or a test, find each.

    tests/mutants.py [NAME]...

Exit status 1 where one was not found, or its place in the source is not there any more. A minute or so
each: the engine is built anew. `QUIRE_SIM_SECONDS` says for how long it looks (60).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ENGINE = "crates/quire/src/"

# Name, what is wrong then, file, what stands there, what stands there with the mistake; and the tests that are to
# find it, where the simulator is not.
MUTANTS = [
    (
        "packing",
        "what Zstandard has packed is unpacked by LZ4",
        "swap/compress.rs",
        "Compressed::Packed(Packing::Zstd, &self.zstd_output[..length])",
        "Compressed::Packed(Packing::Lz4, &self.zstd_output[..length])",
    ),
    (
        "repacking",
        "a page that was packed harder keeps the name of what was freed",
        "reclaim/writeback.rs",
        "        page.rename(new.get());\n        self.budget.count(Event::ZswpRepacked, 1);",
        "        self.budget.count(Event::ZswpRepacked, 1);",
    ),
    (
        "compaction",
        "a page keeps the name of the place that compaction has emptied",
        "reclaim/writeback.rs",
        "                if names_it {\n                    page.rename(new.get());\n                }\n",
        "",
    ),
    (
        "writeback",
        "what was written back stays in the pool",
        "reclaim/writeback.rs",
        "                    self.free_stored(Stored::Pool(handle.get()));\n"
        "                    self.note_written_back(page.page());",
        "                    self.note_written_back(page.page());",
    ),
    (
        "writeback-limbo",
        "a page that came back from limbo while it was written is taken for written",
        "reclaim/writeback.rs",
        "is_there && page.has(Flags::WRITEBACK) && !page.has(Flags::LAZYFREE)",
        "is_there || page.state() == State::Mapped",
    ),
    (
        "window",
        "a window goes on behind the end of its VMA",
        "fault/order.rs",
        "PageRange::new(page.align_down(self.order), 1 << self.order).intersect(vma.range)",
        "{ let _ = vma; PageRange::new(page.align_down(self.order), 1 << self.order) }",
    ),
    (
        "copy",
        "a page that was written gives its packed copy up only where it keeps it",
        "fault/window.rs",
        "            if settled == Settled::Mapped {\n                self.add_stored",
        "            if settled != Settled::Mapped {\n                self.add_stored",
    ),
    (
        "pins",
        "a pinned page goes to limbo with the others of its batch",
        "reclaim/evict.rs",
        "            is_unlocked[first..first + kept].fill(true);\n"
        "            for page in PageRange::new(at, kept).pages() {\n"
        "                match batch.victim(self, page) {\n"
        "                    Some(victim) => victim.set_flags(stayed),\n"
        "                    None => self.unlock_page(page),\n"
        "                }\n"
        "            }\n",
        "            let _ = stayed;\n",
    ),
    (
        "protection",
        "a page is copied to swap without its writes being held off",
        "reclaim/copy.rs",
        "self.mmu.write_protect(chunk, Protection::WriteProtected).refusal.is_none();",
        "chunk.len() > 0;",
    ),
    (
        "last-check",
        "a fault maps without a last look at its VMA",
        "fault/mod.rs",
        "            way.check_current(&self.vmas, vma)?;\n            if takes_memory",
        "            if takes_memory",
    ),
    (
        "last-check-object",
        "a fault on an object maps without a last look at its VMA",
        "object/fault.rs",
        "may_go_on)?;\n                may_go_on()?;\n",
        "may_go_on)?;\n",
        ("--test", "simulator_objects"),
    ),
    (
        "compaction-word",
        "compaction does not look whether a page's word still names what it moves",
        "reclaim/writeback.rs",
        "let names_it = page.content().stored() == Some(Stored::Pool(old.get()));",
        "let names_it = true;",
        ("--test", "swap_tiers", "compaction"),
    ),
    (
        "writeback-again",
        "a page that was packed anew where it was is taken for what was written",
        "reclaim/writeback.rs",
        "page.in_swap() == Some(Stored::Pool(handle.get())) && page.has(Flags::WRITEBACK)",
        "page.in_swap() == Some(Stored::Pool(handle.get()))",
        ("--test", "swap_tiers", "packed_anew"),
    ),
    (
        "lost-page",
        "a lost page is a hole in a run of victims",
        "reclaim/evict.rs",
        "State::Mapped | State::Poisoned",
        "State::Mapped",
        ("--test", "batched_unmap", "lost_page"),
    ),
    (
        "free-together",
        "of the slabs that are emptied together one is not given back",
        "swap/zpool.rs",
        "for slot in &emptied[..count] {",
        "for slot in emptied[..count].iter().skip(1) {",
        ("--lib", "zpool"),
    ),
    (
        "stream",
        "a long stream goes on where it passes over pages in swap",
        "fault/order.rs",
        "missed() * PASSED_PART > 1 << order",
        "missed() > 2 << order",
        ("--lib", "order"),
    ),
    (
        "frame-window",
        "a run of frames goes on into the next window",
        "mmu/mod.rs",
        "            && frame.0 >> BLOCK_ORDER == self.start.0 >> BLOCK_ORDER\n",
        "",
        ("--test", "batched_unmap", "two_windows_of_frames"),
    ),
    (
        "batch-restart",
        "a batch that was refused a page goes on with the length of the one before",
        "reclaim/evict.rs",
        "                evicted.add(self.evict_batch(&batch, vma, scratch));\n                batch.restart(page);\n",
        "                evicted.add(self.evict_batch(&batch, vma, scratch));\n",
        ("--test", "batched_unmap", "a_short_run_after_a_long_one"),
    ),
    (
        "batch-clean",
        "clean pages end the batch of those around them",
        "reclaim/evict.rs",
        "        let mut evicted = self.drop_clean(&clean, vma, who);\n",
        "        let mut evicted = Evicted::default();\n"
        "        clean.range.pages().filter_map(|page| clean.victim(self, page)).for_each(LockedPage::unlock);\n",
        ("--test", "clean", "scattered_clean_pages"),
    ),
    (
        "around-cut",
        "what is mapped around a fault goes on behind the end of its mapping",
        "object/fault_around.rs",
        "around.intersect(view.bounds(page)).intersect(",
        "around.intersect(",
        ("--test", "objects_around", "a_window_is_aligned"),
    ),
    (
        "around-aligned",
        "what is mapped around a fault begins with it",
        "object/fault_around.rs",
        "PageRange::new(page.align_down(order), 1 << order)",
        "PageRange::new(page, 1 << order)",
        ("--test", "objects_around", "a_window_is_aligned"),
    ),
    (
        "around-writeback",
        "a page that is being written back is mapped around a fault",
        "object/fault_around.rs",
        "word.state() == State::Cached && !word.has(Flags::WRITEBACK)",
        "word.state() == State::Cached",
        ("--test", "objects_around", "a_page_that_cannot_be_had"),
    ),
    (
        "around-cold",
        "all that is mapped around a fault counts as used",
        "object/fault_around.rs",
        "if page == asked && page < at {",
        "if page < at {",
        ("--test", "objects_around", "only_the_page_that_was_asked_for"),
    ),
    (
        "doubt-changed",
        "a fault goes on whose VMA has changed",
        "fault/speculative.rs",
        "let is_current = self == Way::Classic || vmas.is_current(vma);",
        "let is_current = self == Way::Classic || vmas.is_current(vma) || true;",
        ("--test", "speculative_objects", "a_vma_that_changes"),
    ),
    (
        "doubt-access",
        "a fault whose rights went is no doubt",
        "fault/speculative.rs",
        "if self == Way::Speculative && !is_allowed {",
        "if self == Way::Exempt && !is_allowed {",
        ("--test", "speculative_objects", "rights_that_go"),
    ),
    (
        "rmap-exclusive",
        "walks share the reverse map's lock where they are to keep others out",
        "object/i_mmap/mod.rs",
        "if self.walks_exclusive.load(Ordering::Relaxed) { Side::Writer } else { Side::Reader }",
        "if self.walks_exclusive.load(Ordering::Relaxed) { Side::Reader } else { Side::Reader }",
        ("--lib", "i_mmap"),
    ),
    (
        "free-clear",
        "a page that is given back keeps the sign of a waiter that has gone",
        "page/wait.rs",
        "            word.reset();\n",
        "",
        ("--test", "page_wait"),
    ),
]


SIMULATOR = ("--test", "simulator", "the_programs")


def run_tests(tree, target, *tests):
    command = ["cargo", "test", "--quiet", "-p", "quire", *tests]
    seconds = os.environ.get("QUIRE_SIM_SECONDS", "60")
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "QUIRE_SIM_SECONDS": seconds}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def is_found(tree, target, mutant):
    """Plants a mistake, looks for it, and mends it again: whether all is well, and what there is to say."""
    _, _, file, right, wrong, *tests = mutant
    tests = tests[0] if tests else SIMULATOR
    source = tree / ENGINE / file
    text = source.read_text()
    if text.count(right) != 1:
        return False, f"{file} has no such place any more"
    source.write_text(text.replace(right, wrong))
    try:
        built = run_tests(tree, target, *tests, "--no-run")
        if built.returncode != 0:
            return False, f"it does not build: {built.stderr[-1000:]}"
        ran = run_tests(tree, target, *tests)
        said = [line for line in (ran.stdout + ran.stderr).splitlines() if line.startswith(("seed ", "thread "))]
        return ran.returncode != 0, said[0] if said else ""
    finally:
        source.write_text(text)


def main():
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")).resolve() / "mutants"
    unknown = set(sys.argv[1:]) - {mutant[0] for mutant in MUTANTS}
    if unknown:
        sys.exit(f"there is no {', '.join(sorted(unknown))}")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="quire-mutants-") as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns("target", ".git", "demo-data")
        shutil.copytree(REPOSITORY, tree, ignore=ignored)
        for mutant in MUTANTS:
            if len(sys.argv) > 1 and mutant[0] not in sys.argv[1:]:
                continue
            found, why = is_found(tree, target, mutant)
            missed += not found
            print(f"{'found' if found else 'MISSED'} {mutant[0]}: {mutant[1]}: {why[:200]}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
