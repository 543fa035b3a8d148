//! What the tests of the reverse map look at in a tree.

use super::*;

impl Tree<'_> {
    /// Asserts order, balance, and what each node says of its subtree; returns how many there are.
    pub fn check(&self) -> usize {
        self.check_subtree(self.root.load(Relaxed), (0, NONE), (u64::MAX, u32::MAX))
    }

    /// As deep as the tree is high.
    fn check_subtree(&self, slot: u32, above: (u64, u32), below: (u64, u32)) -> usize {
        if slot == NONE {
            return 0;
        }
        let (node, key) = (self.at(slot), self.key(slot));
        assert!(above <= key && key < below, "slot {slot} is out of order");
        let (left, right) = (node.child(LEFT), node.child(RIGHT));
        let count =
            1 + self.check_subtree(left, above, key) + self.check_subtree(right, key, below);
        let (on_the_left, on_the_right) = (self.height(left), self.height(right));
        assert!(on_the_left.abs_diff(on_the_right) <= 1, "slot {slot} is out of balance");
        assert_eq!(node.height.load(Relaxed), 1 + on_the_left.max(on_the_right));
        let end = self.subtree_end(left).max(self.subtree_end(right)).max(node.end.load(Relaxed));
        assert_eq!(node.subtree_end.load(Relaxed), end, "slot {slot} knows a wrong end");
        assert!(!node.mapping().pages.is_empty());
        count
    }
}

std::thread_local! {
    /// Nodes that this thread's walks have looked at.
    pub(crate) static LOOKS: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
}
