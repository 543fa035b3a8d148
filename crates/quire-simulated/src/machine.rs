//! A machine with virtual CPUs, and the threads that run on it: the program's, and those that serve it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Result, bail, ensure};
use clap::Args;
use quire::control::Event;
use quire::mmu::Access;
use quire::process::HANDLERS_AUTO_MAX;
use quire::scratch::Scratch;
use quire::space::VmSpace;
use quire::sys::thread::ThreadId;
use quire::units::PageNum;
use quire_simulated::{Baton, Costs, Settings, Simulated};

/// What a simulation came to, by name.
pub(crate) type Figures = [(&'static str, f64); 6];

#[derive(Args, Debug)]
pub(crate) struct Machine {
    #[arg(long)]
    pub threads: usize,

    #[arg(long)]
    pub cpus: usize,

    /// What a call of the kernel costs, nanoseconds
    #[arg(long)]
    pub call_ns: u64,

    /// What each page of such a call costs
    #[arg(long)]
    pub page_ns: u64,

    /// A fault's way to a handler and back; inline into the signal's handler and back
    #[arg(long)]
    pub fault_ns: u64,

    /// What a step of the engine costs, from one lock or word to the next
    #[arg(long)]
    pub step_ns: u64,

    /// What the program does with a page
    #[arg(long)]
    pub touch_ns: u64,
}

/// What runs on a machine.
pub(crate) trait Program: Sync {
    fn space(&self) -> &VmSpace<Simulated>;

    /// A thread of the program's.
    fn thread(&self, index: usize, run: &Run<'_>);

    /// Serves a fault, in a handler.
    fn serve(&self, thread: ThreadId, page: PageNum, access: Access, scratch: &mut Scratch);

    /// The engine's background thread.
    fn tend(&self, _run: &Run<'_>) {}
}

/// A run of a program.
pub(crate) struct Run<'a> {
    pub machine: &'a Machine,
    pub baton: Arc<Baton>,
    threads_left: AtomicUsize,
    /// What handlers were busy for.
    handling_ns: AtomicU64,
}

impl Machine {
    /// As many handlers as a run of quire's has.
    pub(crate) fn handlers(&self) -> usize {
        self.cpus.min(HANDLERS_AUTO_MAX)
    }

    /// Runs a program with so many handlers on the first CPUs.
    pub(crate) fn run<P: Program>(
        &self,
        handlers: usize,
        program: impl FnOnce(&Run<'_>) -> Result<P>,
    ) -> Result<Figures> {
        ensure!(self.threads > 0 && self.cpus > 0, "a machine runs a thread on a CPU at least");
        // The last one is the background thread.
        let numbers = (0..self.threads).chain(0..handlers).chain([0]);
        let cpu_of = numbers.map(|number| number % self.cpus).collect();
        let run = Run {
            machine: self,
            baton: Arc::new(Baton::on_cpus(1, cpu_of, self.step_ns)),
            threads_left: AtomicUsize::new(self.threads),
            handling_ns: AtomicU64::new(0),
        };
        let program = program(&run)?;
        thread::scope(|scope| {
            for index in 0..=self.threads + handlers {
                let (run, program) = (&run, &program);
                scope.spawn(move || {
                    run.baton.start(index);
                    match index.checked_sub(self.threads) {
                        None => run.run_thread(program, index),
                        Some(handler) if handler < handlers => run.handle(program),
                        Some(_) => program.tend(run),
                    }
                    run.baton.end();
                });
            }
        });
        if let Some(failure) = run.baton.failure() {
            bail!("the simulation failed: {failure}");
        }
        let counted = |event| program.space().budget().counted(event) as f64;
        Ok([
            ("seconds", run.baton.elapsed_ns() as f64 / 1e9),
            ("faults", counted(Event::Pgfault)),
            ("speculative", counted(Event::SpeculativePgfault)),
            ("handling_seconds", run.handling_ns.load(Ordering::Relaxed) as f64 / 1e9),
            ("unmap_seconds", counted(Event::UnmapNs) / 1e9),
            ("unmap_calls", counted(Event::UnmapCalls)),
        ])
    }
}

impl Run<'_> {
    /// How a simulated MMU of this machine's behaves.
    pub(crate) fn settings(&self) -> Settings {
        let Machine { call_ns, page_ns, fault_ns, .. } = *self.machine;
        let costs = Costs { call_ns, page_ns, fault_ns };
        Settings { baton: Some(self.baton.clone()), costs, ..Settings::default() }
    }

    /// Whether all threads of the program have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.threads_left.load(Ordering::Relaxed) == 0
    }

    fn run_thread(&self, program: &impl Program, index: usize) {
        program.thread(index, self);
        if self.threads_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            program.space().budget().call_for_memory();
        }
    }

    fn handle(&self, program: &impl Program) {
        let mut scratch = Scratch::new().expect("there is memory for a handler");
        loop {
            let mut next = None;
            self.baton.idle_until(|| {
                next = program.space().mmu().try_next_message();
                next.is_some() || self.is_over()
            });
            let Some((thread, page, access)) = next else { return };
            let begun = self.baton.now_ns();
            program.serve(thread, page, access, &mut scratch);
            self.handling_ns.fetch_add(self.baton.now_ns() - begun, Ordering::Relaxed);
        }
    }
}
