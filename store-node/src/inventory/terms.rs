//! Which commands a node obeys: those of its cluster, with a term at least as high as any it has seen.
//!
//! One gate for all sessions of the node, so a deposed master that is still connected is refused as
//! soon as its successor has spoken on another session. The highest term is on disk before a command
//! that carries it is obeyed: a restarted node does not obey an older master.

use larder_proto::ids::{ClusterId, Term};
use parking_lot::Mutex;
use std::io;

/// Where the highest term is kept over restarts.
pub trait TermStore: Send + Sync + 'static {
    /// What was saved last.
    ///
    /// # Errors
    /// The state is there and cannot be read.
    fn load(&self) -> io::Result<Option<Term>>;
    /// Durable when it returns.
    ///
    /// # Errors
    /// It is not durable.
    fn save(&self, term: Term) -> io::Result<()>;
}

/// Why a master is not obeyed.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The cluster of a node changes only by an explicit act of its operator.
    #[error("the node belongs to cluster {own}, the master to cluster {theirs}")]
    OtherCluster {
        /// The node's cluster.
        own: ClusterId,
        /// The master's cluster.
        theirs: ClusterId,
    },
    /// A newer leader has spoken.
    #[error("term {theirs} is over: the node has seen term {seen}")]
    OldTerm {
        /// The highest term seen.
        seen: u64,
        /// The term of the command.
        theirs: u64,
    },
    /// The term is new and could not be made durable.
    #[error("save term {term}")]
    Save {
        /// The new term.
        term: u64,
        /// What the disk said.
        source: io::Error,
    },
}

/// See the module.
pub struct TermGate {
    seen: Mutex<Option<Term>>,
    store: Box<dyn TermStore>,
}

impl std::fmt::Debug for TermGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TermGate").field("seen", &*self.seen.lock()).finish_non_exhaustive()
    }
}

impl TermGate {
    /// Starts from what the store has.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn open(store: Box<dyn TermStore>) -> io::Result<Self> {
        Ok(Self { seen: Mutex::new(store.load()?), store })
    }

    /// The highest term seen.
    pub fn seen(&self) -> Option<Term> {
        *self.seen.lock()
    }

    /// Whether to talk to this master at all: only the cluster counts, since a master that does not lead
    /// answers lookups like any other. A new term is remembered.
    ///
    /// # Errors
    /// Another cluster, or the term could not be saved.
    pub fn greet(&self, term: Term) -> Result<(), Refusal> {
        match self.admit(term) {
            Err(Refusal::OldTerm { .. }) => Ok(()),
            other => other,
        }
    }

    /// Whether to obey a command of this term. A higher one is durable before this returns.
    ///
    /// # Errors
    /// Another cluster, an older term, or the term could not be saved.
    pub fn admit(&self, term: Term) -> Result<(), Refusal> {
        // Held while saving: a second command of the new term must not overtake its durability.
        let mut seen = self.seen.lock();
        match *seen {
            Some(own) if own.cluster != term.cluster => {
                return Err(Refusal::OtherCluster { own: own.cluster, theirs: term.cluster });
            }
            Some(own) if !own.admits(&term) => {
                return Err(Refusal::OldTerm { seen: own.number, theirs: term.number });
            }
            Some(own) if own == term => return Ok(()),
            _ => {}
        }
        self.store.save(term).map_err(|source| Refusal::Save { term: term.number, source })?;
        *seen = Some(term);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct VolatileTerms(Mutex<Option<Term>>);

    impl TermStore for VolatileTerms {
        fn load(&self) -> io::Result<Option<Term>> {
            Ok(*self.0.lock())
        }

        fn save(&self, term: Term) -> io::Result<()> {
            *self.0.lock() = Some(term);
            Ok(())
        }
    }

    struct FullDisk;
    impl TermStore for FullDisk {
        fn load(&self) -> io::Result<Option<Term>> {
            Ok(None)
        }
        fn save(&self, _: Term) -> io::Result<()> {
            Err(io::ErrorKind::StorageFull.into())
        }
    }

    fn term(cluster: u8, number: u64) -> Term {
        Term { cluster: ClusterId::from_bytes([cluster; 16]), number }
    }

    #[test]
    fn an_older_term_is_greeted_and_not_obeyed() {
        let gate = TermGate::open(Box::new(VolatileTerms::default())).unwrap();
        gate.admit(term(1, 5)).unwrap();
        assert!(matches!(gate.admit(term(1, 4)), Err(Refusal::OldTerm { seen: 5, theirs: 4 })));
        gate.greet(term(1, 4)).unwrap();
        assert_eq!(gate.seen(), Some(term(1, 5)));
        gate.greet(term(1, 6)).unwrap();
        assert!(gate.admit(term(1, 5)).is_err(), "a term seen in a greeting counts");
    }

    #[test]
    fn a_master_of_another_cluster_is_neither_greeted_nor_obeyed() {
        let gate = TermGate::open(Box::new(VolatileTerms::default())).unwrap();
        gate.greet(term(1, 5)).unwrap();
        assert!(matches!(gate.greet(term(2, 9)), Err(Refusal::OtherCluster { .. })));
        assert!(matches!(gate.admit(term(2, 9)), Err(Refusal::OtherCluster { .. })));
    }

    #[test]
    fn a_term_that_is_not_durable_is_not_obeyed() {
        let gate = TermGate::open(Box::new(FullDisk)).unwrap();
        assert!(matches!(gate.admit(term(1, 1)), Err(Refusal::Save { term: 1, .. })));
        assert_eq!(gate.seen(), None);
    }
}
