//! One object mapped in as many address spaces as can be. Alone in its process: each reserves a
//! TiB of addresses.

#[path = "common/objects.rs"]
mod common;

use common::{PAGE, Watchdog, drop_pages, load, space_by, survive_sigbus};
use quire::library::{AddressSpace, Error, MapOptions, Mapping, Object};
use quire::store::test::VecStore;

/// Most hosts of an owner.
const HOSTS_MAX: usize = 64;

#[test]
fn one_host_too_many_is_an_error_until_another_has_gone() {
    let _watchdog = Watchdog::new(120);
    survive_sigbus();
    let builder = AddressSpace::builder().memory(1 << 20).handlers(1).workers(1);
    let Some(owner) = space_by(&builder) else { return };
    let object = Object::with_store(&owner, VecStore::new(vec![7; PAGE]), Some(0)).unwrap();
    let map = |host: AddressSpace| -> Result<Mapping, Error> {
        // SAFETY: nobody writes it.
        unsafe { MapOptions::new().in_space(&host).map(&object) }
    };
    let host = || builder.clone().build().unwrap();
    let mut maps: Vec<Mapping> = (0..HOSTS_MAX).map(|_| map(host()).unwrap()).collect();
    let refused = map(host()).map(drop);
    let is_right = matches!(refused, Err(Error::NoMemory { doing: "map an object", .. }));
    assert!(is_right, "{refused:?}");
    // The mapping was the last that kept its host.
    drop(maps.swap_remove(17));
    maps.push(map(host()).unwrap());
    for (place, map) in maps.iter().enumerate() {
        assert_eq!(load(map.as_ptr(), 0), Some(7), "mapping {place}");
    }
    drop_pages(&object, 0..object.len(), 1);
    assert!(maps.iter().all(|map| map.mapped_pages() == 0), "it goes from all of them");
}
