-- forget: this dispatcher is gone
DELETE FROM bridge_dispatcher WHERE id = %(id)s::uuid
