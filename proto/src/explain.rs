//! Why a block is, or is not, a hit: the closed list of reasons that a master gives.

use crate::wire::wire_enum;

wire_enum! {
    /// A reason; the most telling first: where several contents are asked, the first of this order is
    /// the answer.
    pub enum Reason: u8, "reason" {
        /// It is usable now.
        Hit = 0 => "hit",
        /// Parts of it are missing everywhere.
        Incomplete = 1 => "incomplete",
        /// Who has it is not in session.
        NodeDown = 2 => "node_down",
        /// It was there and was withdrawn because a copy was damaged.
        Damaged = 3 => "damaged",
        /// It was there and was removed lately.
        Evicted = 4 => "evicted",
        /// It is there in another layout.
        OtherLayout = 5 => "other_layout",
        /// It is there under another content.
        OtherContent = 6 => "other_content",
        /// Another tenant has it.
        NotYours = 7 => "not_yours",
        /// No node in session has it, and nothing is remembered of it.
        NeverSeen = 8 => "never_seen",
    }
}

impl Reason {
    /// The reason with this name, in which form it travels.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_found_by_its_name_and_others_are_not() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_name(reason.name()), Some(*reason));
        }
        assert_eq!(Reason::from_name("HIT"), None);
        assert_eq!(Reason::ALL.iter().min(), Some(&Reason::Hit));
    }
}
